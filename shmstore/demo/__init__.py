"""`shmstore demo`: the main job on real photographs, by the store and by pickle, side by side.

    images      which photographs, and their pixels
    processing  a photograph -> an item: its key and its dict of tensors
    transports  one way an item can reach the workers each: `store`, `pickle`
    messages    what the processes say to each other, and the pipes they say it through
    processes   the API process, the engine process, a worker process
    supervisor  starts them, watches them, leaves nothing behind
    report      figures -> a table or JSON
    main        the command

Each module imports only those above it.
"""
