"""What the ordinary HTTP apps share: typed routes, error bodies, paging, OpenAPI."""
