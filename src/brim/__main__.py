"""`python -m brim`: the command, where the script `brim` is not on the path."""

from brim.cli.main import main

if __name__ == "__main__":
    main()
