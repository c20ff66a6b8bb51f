"""What the ops on logits share."""
