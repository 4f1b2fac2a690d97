def compile_factors():
    return {}


def enable_envs_cache():
    pass


def disable_envs_cache():
    pass
