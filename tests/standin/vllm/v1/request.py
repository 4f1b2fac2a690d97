import enum
from dataclasses import dataclass


class RequestStatus(enum.Enum):
    RUNNING = enum.auto()
    FINISHED_ABORTED = enum.auto()


@dataclass
class Request:
    request_id: str
    prompt: str
    max_tokens: int
    done: int = 0
    number: int = 0
