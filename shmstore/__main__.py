"""`python -m shmstore`: the same as the `shmstore` command."""

if __name__ == "__main__":  # a spawned process imports this module again under another name, and needs none of it
    import sys

    from shmstore.cli.main import main

    sys.exit(main())
