"""`python -m sardonyx`: the program, where it is not on PATH."""

from sardonyx.cli import main

if __name__ == "__main__":
    main()
