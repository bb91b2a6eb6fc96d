"""One file a dialect: a route is found, the request decoded, dispatched, and its answer encoded."""
