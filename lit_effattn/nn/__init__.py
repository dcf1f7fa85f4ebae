"""What models are made of besides attention: Transformer, LSTM, heads, embeddings, front ends."""
