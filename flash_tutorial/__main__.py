"""`python -m flash_tutorial` is `flash-tutorial`."""

from flash_tutorial.cli import main

if __name__ == "__main__":
    main(prog_name="flash-tutorial")
