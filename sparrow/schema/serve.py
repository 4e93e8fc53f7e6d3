"""The configuration of `sparrow serve`, and what a client finds out about a server."""

from typing import Annotated, Literal

from pydantic import Field

from sparrow.schema.base import Record
from sparrow.schema.common import NEEDS_BUDGET
from sparrow.schema.options import HELP, argument, option
from sparrow.schema.sampling import Decoding, DraftTokens
from sparrow.schema.types import (
    Budget,
    Count,
    Directory,
    Gib,
    Name,
    Seconds,
    Tokens,
    environment_key,
)

DIGEST, DAMAGED = "content-digest", "damaged_body"  # a header, and the error of a wrong one
LOCAL = ("127.0.0.1", "::1", "localhost")
KEY, ADMIN_KEY = "SPARROW_API_KEY", "SPARROW_ADMIN_KEY"  # of the environment
Port = Annotated[int, Field(ge=0, le=65535)]
Key = Annotated[str, Field(min_length=8, max_length=256, pattern=r"^[\x21-\x7e]+$")]


class ServeConfig(Record):
    """`sparrow serve`: the model, how it decodes by default, and the limits of the server."""

    model: Name = argument(..., HELP["model"])
    host: Name = option("127.0.0.1", "Address to listen on; wider than this machine needs a key.")
    port: Port = option(8000, "0: any that is free.")
    api_key: Key | None = option(
        None, f"Required of clients as a bearer token; better given by {KEY}."
    )
    name: Name | None = option(None, "Of the model for clients. Default: as given.")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    decoding: Decoding | None = option(None, HELP["decoding"])
    schedule: Name | None = option(None, HELP["schedule"])
    budget: Budget | None = option(None, HELP["budget"])
    flow: Name | None = option(None, HELP["flow"])
    force: bool = False
    draft_tokens: DraftTokens | None = option(None, HELP["draft_tokens"])
    adapter: Directory | None = option(None, HELP["adapter"])
    max_running: Count | None = option(None, "Samples decoded at once. Default: 256, CPU: 64.")
    max_context: Tokens | None = option(None, "Longest sequence. Default: the model's.")
    kv_gib: Gib | None = option(None, "Memory of the KV cache. Default: what is free.")
    max_waiting: Count = option(256, "Samples that may wait; beyond them clients get 429.")
    max_n: Count = option(128, "Samples of a request, over all of its prompts.")
    max_body_mib: Count = option(8, "Size of a request.")
    stream_interval: Annotated[float, Field(ge=0, le=1)] = option(
        0.05, "Seconds between the chunks of a streamed answer."
    )
    drain: Seconds = option(30.0, "Seconds for running requests after SIGTERM.")
    admin_port: Port | None = option(
        None, "For trainers: weights, schedule, sleep. Default: no such port."
    )
    admin_key: Key | None = option(None, f"Required there; better given by {ADMIN_KEY}.")

    def _check(self) -> None:
        sparse = self.budget is not None or self.schedule is not None
        one = self.budget is None or self.schedule is None
        self.require(one, "budget", "one of budget and schedule")
        self.require(sparse or self.decoding in (None, "dense"), "decoding", NEEDS_BUDGET)
        exact = self.decoding == "exact" or self.draft_tokens is None
        self.require(exact, "draft_tokens", "only with decoding = exact")
        self.require(sparse or self.adapter is None, "adapter", "only with a budget or schedule")
        closed = self.host in LOCAL or self.key is not None
        self.require(closed, "host", f"{LOCAL[0]}, or another one with an api_key ({KEY})")

        admin = self.admin_port is None or self.admin_secret not in (None, self.key)
        self.require(admin, "admin_port", f"a key of its own: admin_key, or {ADMIN_KEY}")
        apart = not self.port or self.admin_port != self.port
        self.require(apart, "admin_port", "another one than port")

    @property
    def admin_secret(self) -> str | None:
        """The key of the admin port, also from the environment."""
        return self.admin_key or environment_key(ADMIN_KEY)

    @property
    def key(self) -> str | None:
        """The key that clients need, also from the environment."""
        return self.api_key or environment_key(KEY)


class Capabilities(Record):
    """What a server can do for a trainer, and in `notes` what it cannot."""

    server: str  # "sparrow", or the owner of the model that it names
    model: str
    token_ids: bool  # of answers
    prompt_token_ids: bool
    logprobs: bool
    logprobs_as_drawn: bool  # after temperature and truncation
    weight_versions: bool
    decoding: bool  # sparse and exact
    notes: tuple[str, ...] = ()
