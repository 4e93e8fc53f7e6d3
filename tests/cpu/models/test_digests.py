"""SHA256SUMS of model folders, shipped models that are pinned, and what headers say of it."""

import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sparrow import files, models
from sparrow.files import SUMS, file_digest, read_sums, verify, write_sums
from sparrow.models import sources
from sparrow.models.checkpoint import load, save
from sparrow.models.lora import Adapter
from sparrow.models.sources import PINNED, SHIPPED

READ = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return shutil.copytree(SHIPPED / "tiny", tmp_path / "tiny")


def use(folder: Path) -> None:
    load(folder, device="cpu")
    models.load_tokenizer(folder)


def damage(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.unlink()  # an edited file is a new one, whatever the resolution of the file system's clock
    file.write_bytes(content)


def test_a_flipped_byte_is_refused_wherever_it_is(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that did not change are not read again for their digests."""
    read: list[str] = []

    def counted(file: Path) -> str:
        read.append(file.name)
        return file_digest(file)

    monkeypatch.setattr(files, "file_digest", counted)
    for _ in range(2):
        use(tiny)
    assert sorted(read) == sorted(READ)
    draw = random.Random(0)
    whole = {name: (tiny / name).read_bytes() for name in READ}
    for name in READ * 8:
        damage(tiny / name, draw.randrange(len(whole[name])))
        with pytest.raises(ValueError, match=SUMS) as refused:
            use(tiny)
        assert str(tiny / name) in str(refused.value)
        (tiny / name).unlink()
        (tiny / name).write_bytes(whole[name])
    use(tiny)


def test_files_that_are_not_listed_or_not_there_are_refused(tiny: Path) -> None:
    for name in (
        "generation_config.json",
        "chat_template.jinja",
        "additional_chat_templates/a.jinja",
    ):
        (tiny / name).parent.mkdir(exist_ok=True)
        (tiny / name).write_text("{}")
        with pytest.raises(ValueError, match=f"{name} .*{SUMS}"):
            use(tiny)
        (tiny / name).unlink()
    for name in READ[2:]:
        (tiny / name).rename(tiny / "elsewhere")
        with pytest.raises(ValueError, match=f"{name} .*{SUMS}"):
            verify(tiny, READ)
        (tiny / "elsewhere").rename(tiny / name)
    (tiny / "notes.txt").write_text("nobody reads this")
    use(tiny)


def test_malformed_lists_are_refused_with_their_line(tiny: Path) -> None:
    digest = "0" * 64
    for line in ("x", digest, f"{digest}  ../x", f"{digest}  /x", f"{digest[1:]}  x", "\x00", ""):
        (tiny / SUMS).write_text(f"{digest}  some\n{line}\n")
        with pytest.raises(ValueError, match="line 2") as refused:
            use(tiny)
        assert str(tiny / SUMS) in str(refused.value)
    for content in (b"", f"{digest}  some".encode(), b"\xff\xfe"):
        (tiny / SUMS).write_bytes(content)
        with pytest.raises(ValueError, match=str(tiny)):
            use(tiny)
    (tiny / SUMS).unlink()
    (tiny / SUMS).symlink_to(tiny / "nowhere")
    with pytest.raises(ValueError, match=SUMS):
        use(tiny)


def test_what_is_saved_is_listed(tiny: Path, tmp_path: Path) -> None:
    """As sha256sum reads it, an adapter beside it too; a damaged tokenizer is not saved anew."""
    model = load(tiny, device="cpu")
    folder = save(model, tmp_path / "saved")
    Adapter.random(model.spec, 2, modules=["q_proj"]).save(folder)
    assert read_sums(folder).keys() == {file.name for file in folder.iterdir()} - {SUMS}
    subprocess.run(["sha256sum", "--quiet", "--strict", "-c", SUMS], cwd=folder, check=True)
    use(folder)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        whole = (folder / name).read_bytes()
        damage(folder / name, len(whole) // 2)
        with pytest.raises(ValueError, match=f"{name} .*{SUMS}"):
            Adapter.load(folder, model.spec, dtype=model.dtype, device="cpu")
        (folder / name).unlink()
        (folder / name).write_bytes(whole)
    Adapter.load(folder, model.spec, dtype=model.dtype, device="cpu")
    damage(tiny / "tokenizer.json", 100)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        save(model, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_shipped_models_are_pinned(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuple(PINNED) == models.shipped()
    for name, pin in PINNED.items():
        assert file_digest(SHIPPED / name / SUMS) == pin
        listed = read_sums(SHIPPED / name)
        assert listed.keys() == {file.name for file in (SHIPPED / name).iterdir()} - {SUMS}
        verify(SHIPPED / name, listed)
    monkeypatch.setattr(sources, "SHIPPED", tiny.parent)
    use(Path("tiny"))
    write_sums(tiny, ["README.md"])  # the same
    use(tiny)
    damage(tiny / "config.json", 10)
    write_sums(tiny, ["config.json"])
    for name in ("tiny", tiny):
        with pytest.raises(ValueError, match=SUMS):
            load(name, device="cpu")
    (tiny / SUMS).unlink()
    with pytest.raises(ValueError, match=SUMS):
        load("tiny", device="cpu")


def test_provenance(tiny: Path, tmp_path: Path) -> None:
    assert models.provenance(load("tiny", device="cpu")) == "pinned"
    assert models.provenance(load(SHIPPED / "tiny", device="cpu")) == "pinned"
    model = load(tiny, device="cpu")
    assert models.provenance(model) == "verified"
    assert models.provenance(models.random(model.spec)) == "random weights"
    (tiny / SUMS).unlink()
    assert models.provenance(load(tiny, device="cpu")) == "unverified"
    snapshot = tmp_path / "models--owner--name" / "snapshots" / COMMIT
    shutil.copytree(tiny, snapshot)
    assert models.provenance(load(snapshot, device="cpu")) == f"revision {COMMIT[:12]}"
    assert sources.model_name(load(snapshot, device="cpu")) == "name"


def test_a_hub_name_may_say_its_revision(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[tuple[str, str | None]] = []

    def download(name: str, *, revision: str | None, **_: Any) -> str:
        asked.append((name, revision))
        return str(tiny)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for name in ("owner/name", f"owner/name@{COMMIT}", "owner/name@refs/pr/1"):
        assert models.locate(name) == tiny
    assert asked == [("owner/name", None), ("owner/name", COMMIT), ("owner/name", "refs/pr/1")]
