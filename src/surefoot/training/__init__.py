"""Making a drafter: prompts, regenerated text, features, training, calibration, evaluation. `pipeline.py` joins the stages."""
