"""All families there are, by what transformers calls their model type."""

from . import decoders, encoders, translators
from .tables import Family

_families = [
    table for file in (encoders, decoders, translators) for table in vars(file).values() if isinstance(table, Family)
]
FAMILIES = {family.native: family for family in sorted(_families, key=lambda family: family.native)}
