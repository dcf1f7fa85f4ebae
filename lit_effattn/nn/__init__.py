"""Parts of models other than attention: Transformer, LSTM, heads, embeddings, front ends."""
