"""What a trained model is used for: generating text from a checkpoint."""
