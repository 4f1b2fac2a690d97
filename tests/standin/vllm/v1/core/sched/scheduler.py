from .interface import PauseState


class Scheduler:
    def __init__(self):
        self.requests = {}
        self._pause_state = PauseState.UNPAUSED

    @property
    def pause_state(self):
        return self._pause_state

    def set_pause_state(self, pause_state):
        self._pause_state = pause_state

    def reset_prefix_cache(self, reset_running_requests=False):
        return True

    def running(self):
        return [] if self._pause_state == PauseState.PAUSED_ALL else list(self.requests.values())

    def get_num_unfinished_requests(self):
        return len(self.running())

    def finish_requests(self, request_ids, finished_status):
        """None is all. Returns the ids of those that were there."""
        wanted = list(self.requests) if request_ids is None else request_ids
        return [request_id for request_id in wanted if self.requests.pop(request_id, None)]
