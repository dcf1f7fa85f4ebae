"""Speech: corpora, features, augmentation."""
