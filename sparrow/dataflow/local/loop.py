"""`sparrow train`: the loop, readable on one screen.

    rows -> episodes -> rewards -> dense log-probs -> advantages -> update -> the engine's weights

The actor that plays is sparse, the policy that learns is dense; the gate watches how far the two
are apart, token by token, in its lower tail.
"""

from pathlib import Path

from sparrow.dataflow.local.messages import Diverged, EpisodeFailed, GateStop, Unjudged
from sparrow.dataflow.local.metrics import step_metrics
from sparrow.dataflow.local.run import Run
from sparrow.dataflow.stopping import Stopped


def train(run: Run) -> Path:
    """Run the steps that are left; the model's folder.

    A wish to stop, the gate, a loss that is no number, verifiers and episodes that fail save what
    there is; what else may come (a full disk, a kill) leaves the last checkpoint.
    """
    try:
        if run.step == 0:
            run.validate()
        while run.step < run.config.run.steps:
            step(run)
    except (Stopped, GateStop, Diverged, Unjudged, EpisodeFailed):
        run.save()
        raise
    run.save()
    return run.finish()


def step(run: Run) -> None:
    """One step."""
    clock = run.begin()
    with clock("gen"):
        played = run.rollout.play(run.request())
        run.ledger.refuse_unjudged(played)
    with clock("old_log_prob"):
        run.rollout.sleep()
        batch = run.learner.read(played)
        look = run.gate.observe(run.step, batch.readings, batch.estimates)
    with clock("update_actor"):
        updates = run.learner.update(batch)
    with clock("weights"):
        run.sync_weights()
    metrics = step_metrics(played, batch, updates, look, clock.seconds())
    run.ledger.record(played, updates, look, metrics)
    run.validate_if_due()
    run.save_if_due()
    run.ledger.heed(look)
