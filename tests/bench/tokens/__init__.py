"""Accuracy of a serving precision: greedy tokens of the shipped model against those of float32 on the CPU."""
