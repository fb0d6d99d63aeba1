"""The demo: the main job on real photographs, with each kind of cache between the processes, side by side.

    processing  the photographs; a photograph -> its hash, and by a real image processor an item and its prompt updates
    messages    the messages between the processes, and the pipes that carry them
    modes       `none`, `lru`, `shm`: a configuration each
    records     the settings of a run, and its figures
    api         the API process: it processes, sends, retries and measures
    processes   the engine process and a worker process
    supervisor  starts the processes, watches them, and leaves nothing behind
    report      figures -> a table
    main        the command

Each module imports only those above it.
"""
