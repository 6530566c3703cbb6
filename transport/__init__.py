"""transport: reach a peer by its public key over QUIC. Knows nothing of models, workers or backbones."""
