"""Training of a drafter, from prompts and regenerated text to calibration and evaluation. `pipeline.py` runs the stages."""
