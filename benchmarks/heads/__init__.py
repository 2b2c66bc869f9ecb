"""Classification of texts: models, gate and tables."""
