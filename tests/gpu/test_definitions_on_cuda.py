"""The definitions run on a GPU too, and give what they give on a CPU."""

import torch

from sparrow import models, ops
from sparrow.engine import generate
from sparrow.models.attention import Packed
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.sparse.rule import Rule

SMALL = {"layers": 3, "hidden": 64, "intermediate": 96, "heads": 8, "kv_heads": 4}


def test_sparse_attention_and_its_gradients() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(300, heads, 16) for heads in (6, 2, 2)]
    results = []
    for device in ("cpu", "cuda"):
        q, k, v = (tensor.to(device, copy=True).requires_grad_() for tensor in tensors)
        numbers = [0, 120, 300], [10, 40], [64] * 300  # bounds, prompts, budgets
        given = (q, k, v, *(torch.tensor(part, device=device) for part in numbers))
        out = ops.attend_sparse(*given, page=16, scale=0.25, scorer=Rule().scorer(2, 16))
        out.square().sum().backward()
        results.append([out.detach().cpu(), q.grad.cpu(), k.grad.cpu(), v.grad.cpu()])
    for cpu, gpu in zip(*results, strict=True):
        torch.testing.assert_close(cpu, gpu, atol=1e-4, rtol=1e-4)


def test_bf16_logits_are_kept_in_fp32() -> None:
    hidden, head = torch.randn(70, 256), torch.randn(1000, 256)
    hidden, head = hidden.bfloat16().cuda(), head.bfloat16().cuda()
    logits = ops.logits(hidden, head)
    exact = hidden.double() @ head.double().T
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 1e-3  # bf16 results would be off by up to 0.25
    ids = torch.randint(1000, (70,), device="cuda")
    stats = ops.token_stats(hidden.requires_grad_(), head, ids, chunk=16)
    stats.logprob.sum().backward()
    expected = exact.log_softmax(1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(stats.logprob.double(), expected, atol=1e-3, rtol=1e-4)
    assert hidden.grad.isfinite().all()


def test_model_and_generation() -> None:
    cpu = models.random("qwen3-0.6b", seed=5, **SMALL, head_size=16, vocabulary=300)
    gpu = models.random(cpu.spec, device="cuda")
    with torch.no_grad():
        for name, view in models.hf_views(gpu).items():
            view.copy_(models.hf_views(cpu)[name])
        ids = torch.arange(90) % 300
        attention = [Packed(bounds=torch.tensor([0, 90], device=d)) for d in ("cpu", "cuda")]
        expected = cpu.logits(cpu(ids, torch.arange(90), attention[0]))
        ids, positions = ids.cuda(), torch.arange(90, device="cuda")
        logits = gpu.logits(gpu(ids, positions, attention[1])).cpu()
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [[1, 2, 3], list(range(40))]
    for schedule in (None, Schedule.fixed(48)):
        ours = [generate(model, prompts, params, schedule=schedule) for model in (cpu, gpu)]
        for left, right in zip(*ours, strict=True):
            assert left.token_ids.tolist() == right.token_ids.tolist()


def test_load_puts_a_bf16_checkpoint_on_the_gpu(tmp_path) -> None:
    small = models.random("qwen3-0.6b", dtype=torch.bfloat16, **SMALL, head_size=16, vocabulary=300)
    again = models.load(models.save(small, tmp_path / "model"))
    assert again.device.type == "cuda"
    assert again.dtype == torch.bfloat16
    for name, view in models.hf_views(small).items():
        assert torch.equal(models.hf_views(again)[name].cpu(), view), name
