"""`ballast audit`: is a recorded step right, of any trainer, and where do two runs part.

bundle         a step in memory: columns, and facts of the trainer
bundle_files   writes and reads it as a folder: step.json, tokens.safetensors
recording      writes one from lists or arrays
"""

from ballast.audit.bundle import Bundle, MissingError
from ballast.audit.bundle_files import bundles_of, read_bundle, write_bundle
from ballast.audit.recording import record

__all__ = ["Bundle", "MissingError", "bundles_of", "read_bundle", "record", "write_bundle"]
