"""The worker: offers a machine to the server and answers for its runners."""
