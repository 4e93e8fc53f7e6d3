"""Seeing to it that arms have been measured on prompts: by rollouts, or by force on what is given.

What the store has is not made again, so whoever asks twice pays once, also after an interruption.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from sparrow.calibrate.arms import DENSE, Arm
from sparrow.calibrate.cells import Tokens
from sparrow.calibrate.replay import MOST_ARMS, Job, Prompt, engine_for, force, roll_out
from sparrow.calibrate.trajectories import Measured, Trajectories
from sparrow.models import Decoder
from sparrow.schema.calibrate import CalibrateConfig
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.types import Progress
from sparrow.sparse.rule import Rule

Mode = Literal["generated", "forced"]
SPREAD = 1_000_003  # between the seeds of neighbouring calibrations: prompts are far fewer


class Collector:
    """Measures arms of one model on numbered prompts, into a store.

    Draws are the same for every arm, which differ in what they see.
    """

    def __init__(
        self,
        model: Decoder,
        prompts: Sequence[Prompt],
        mode: Mode,
        config: CalibrateConfig,
        store: Trajectories,
        progress: Progress | None = None,
    ) -> None:
        if not prompts:
            raise ValueError("no prompt to calibrate on")
        self.model, self.prompts, self.mode = model, prompts, mode
        self.config, self.store = config, store
        if mode == "generated":
            for prompt in prompts:  # whatever does not fit is said before anything is measured
                self._params(prompt)
        self._progress = progress or (lambda done, total, what: None)
        self._tokens: dict[tuple[str, tuple[int, ...]], tuple[int, Tokens]] = {}

    def collect(self, wanted: Mapping[Arm, int]) -> None:
        """So many prompts of every arm, the first ones; arms of one rule, and dense."""
        if self.mode == "forced":
            self._force_first(wanted)
            return
        arms = list(wanted)
        for first in range(0, len(arms), MOST_ARMS):
            self._roll_out({one: wanted[one] for one in arms[first : first + MOST_ARMS]})

    def _roll_out(self, wanted: Mapping[Arm, int]) -> None:
        jobs = self._jobs(wanted)
        if not jobs:
            return
        arms = {job.arm for job in jobs}
        one = next((each for each in arms if each.schedule is not None), DENSE)
        rule = None if one.schedule is None else Rule.of(one.schedule, one.flow)
        engine = engine_for(self.model, rule, self.prompts, self.config.answer_tokens)
        total = len(jobs) * self.config.samples
        what = f"{one.variant}: {len(arms)} arms"
        self._progress(0, total, what)
        for done, (job, measured) in enumerate(roll_out(engine, jobs), 1):
            self.store.put(job.arm.key, measured)
            self._progress(done, total, what)

    def _jobs(self, wanted: Mapping[Arm, int]) -> list[Job]:
        """Prompt by prompt, so that arms advance together."""
        done = {one: self.store.done(one.key) for one in wanted}
        every = range(self.config.samples)
        return [
            Job(arm=one, prompt=prompt, params=self._params(prompt))
            for number, prompt in enumerate(self.prompts)
            for one, count in wanted.items()
            if number < count and any((prompt.number, each) not in done[one] for each in every)
        ]

    def _params(self, prompt: Prompt) -> SamplingParams:
        context = self.model.spec.max_positions
        left = context - len(prompt.ids)
        if left < 2:
            raise ValueError(
                f"prompt {prompt.name} has {len(prompt.ids)} tokens, the model's context "
                f"{context}: nothing can follow it"
            )
        return SamplingParams(
            n=self.config.samples,
            temperature=self.config.temperature,
            max_tokens=min(self.config.answer_tokens, left),
            seed=self.config.seed * SPREAD + prompt.number,
        )

    def _force_first(self, wanted: Mapping[Arm, int]) -> None:
        places = {
            prompt: [one for one, count in wanted.items() if number < count]
            for number, prompt in enumerate(self.prompts)
        }
        self._force({prompt: arms for prompt, arms in places.items() if arms})

    def force(self, arms: Sequence[Arm], sequences: Sequence[Prompt]) -> None:
        """Every arm on every one of these sequences."""
        self._force(dict.fromkeys(sequences, arms))

    def _force(self, places: Mapping[Prompt, Sequence[Arm]]) -> None:
        done = {one: self.store.done(one.key) for arms in places.values() for one in arms}
        missing = {
            prompt: [one for one in arms if (prompt.number, 0) not in done[one]]
            for prompt, arms in places.items()
        }
        total, count = sum(len(arms) for arms in missing.values()), 0
        for prompt, arms in missing.items():
            if not arms:
                continue
            self._progress(count, total, f"reading: {prompt.name}, dense")
            for one, measured in force(self.model, prompt, arms, self.config.temperature):
                count += 1
                self.store.put(one.key, measured)
                self._progress(count, total, f"reading: {prompt.name}, {one.name}")

    def sequences(self) -> list[Prompt]:
        """Whole sequences: those given, or the first answer to each prompt of the dense policy."""
        if self.mode == "forced":
            return list(self.prompts)
        return [
            Prompt(
                number=one.prompt,
                name=f"answer {one.prompt}",
                ids=tuple(one.ids.tolist()),
                start=one.prompt_tokens,
            )
            for one in self.measured(DENSE, self.prompts)
            if one.sample == 0
        ]

    def measured(self, one: Arm, prompts: Sequence[Prompt]) -> Iterator[Measured]:
        """What was measured of an arm on these prompts, whatever else the store holds."""
        wanted = {prompt.number for prompt in prompts}
        return (each for each in self.store.of(one.key) if each.prompt in wanted)

    def tokens(self, one: Arm, prompts: Sequence[Prompt]) -> Tokens:
        """The tokens of an arm on these prompts: a round that was cut short does not count."""
        place = one.key, tuple(prompt.number for prompt in prompts)
        count = len(self.store.done(one.key))
        if self._tokens.get(place, (-1,))[0] != count:
            self._tokens[place] = (count, Tokens.of(self.measured(one, prompts)))
        return self._tokens[place][1]
