"""What holds for every test."""

from hypothesis import settings

# A slow machine is no failure: speed belongs into tests/bench.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
