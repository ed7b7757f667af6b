"""Models of other architectures as ours, and ours as theirs: see `convert_from` and `convert_to`.

`families` has a table for each architecture, `tables` says what such a table is made of, `weights` applies it and
`folders` does so from folder to folder.
"""

from .folders import convert_folder, convert_from, convert_to

__all__ = ["convert_folder", "convert_from", "convert_to"]
