"""`shmstore demo`: the main job on real photographs, with each kind of cache between the processes, side by side.

    images      which photographs, and their pixels
    processing  a photograph -> its hash, and by a real image processor an item and its prompt updates
    memory      what a process has resident, what is shared counted once
    messages    what the processes say to each other, and the pipes they say it through
    modes       what is compared, `none`, `lru`, `shm`: a configuration each; the API process's cache
    records     what a run is to do, and what was measured
    api         the API process: processes, sends, heals, measures
    processes   the engine process, a worker process
    supervisor  starts them, watches them, leaves nothing behind
    report      figures -> a table or JSON
    main        the command

Each module imports only those above it.
"""
