from dataclasses import dataclass


@dataclass
class TokenizedGenerateReqInput:
    rid: str
    prompt: str
    max_new_tokens: int
    done: int = 0
    number: int = 0


@dataclass
class AbortReq:
    rid: str = ""
    abort_all: bool = False


@dataclass
class RpcReqInput:
    method: str
    parameters: dict | None = None


@dataclass
class PauseGenerationReqInput:
    mode: str = "abort"


@dataclass
class ContinueGenerationReqInput:
    torch_empty_cache: bool = False


@dataclass
class GetInternalStateReq:
    """``name``: of an environment variable, as each rank sees it."""

    name: str = ""


@dataclass
class ShutdownReq:
    pass
