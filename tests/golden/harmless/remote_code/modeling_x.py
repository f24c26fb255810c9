"""Comes with a model; whoever imports it leaves a file behind."""
import pathlib

pathlib.Path("ran").touch()
