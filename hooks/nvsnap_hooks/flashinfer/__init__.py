"""What FlashInfer holds of other GPUs."""
