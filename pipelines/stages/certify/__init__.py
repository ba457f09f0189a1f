"""Stage certify: votes, certificates and the attacks that challenge them."""
