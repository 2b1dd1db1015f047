"""Cost of a batch at each stage, and the prediction for more cores."""
