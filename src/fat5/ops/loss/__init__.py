"""Cross-entropy from logits, and from hidden states without keeping the logits."""

from fat5.ops.loss.api import CrossEntropyOutput, cross_entropy, linear_cross_entropy

__all__ = ["CrossEntropyOutput", "cross_entropy", "linear_cross_entropy"]
