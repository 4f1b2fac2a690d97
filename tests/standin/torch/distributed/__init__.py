from .distributed_c10d import (
    Transport,
    all_gather_object,
    all_reduce,
    barrier,
    destroy_process_group,
    get_backend,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
    new_group,
)
