"""What a trained model is used for: evaluating, generating, looking at it, and going to and from Hugging Face."""
