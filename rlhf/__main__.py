"""`python -m rlhf`: the command `rlhf` without its program file, for example for `torchrun -m rlhf`."""

from rlhf.commands.cli import main

if __name__ == "__main__":
    main()
