"""Images, attention maps and pictures of utterances."""
