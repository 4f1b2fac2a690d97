from standin.shm_broadcast import MessageQueue, ShmRingBuffer  # noqa: F401
