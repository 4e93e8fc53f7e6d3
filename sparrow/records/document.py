"""A document to learn from: token ids of a prompt and of what should follow it."""

from dataclasses import dataclass

from sparrow.records.base import Int32Array, Record


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Document(Record):
    """The first `prompt` tokens are given, the others are learnt."""

    ids: Int32Array
    prompt: int

    def __len__(self) -> int:
        return len(self.ids)

    def _check(self) -> None:
        if not 1 <= self.prompt < len(self.ids):
            raise ValueError(
                f"Document.prompt: got {self.prompt} of {len(self.ids)} tokens, "
                "allowed: at least 1, and fewer than all"
            )
