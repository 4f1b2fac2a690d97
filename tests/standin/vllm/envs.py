def compile_factors():
    return {}
