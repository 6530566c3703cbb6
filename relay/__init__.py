"""relay: forwards sealed datagrams between peers that cannot reach each other. It cannot read them."""
