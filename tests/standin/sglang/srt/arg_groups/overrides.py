def resolving_view(server_args):
    return server_args
