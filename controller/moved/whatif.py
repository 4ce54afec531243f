import importlib
import sys

if __name__ == "__main__":
    sys.exit(importlib.import_module("ballast.commands").main(["whatif"]))
