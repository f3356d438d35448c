"""One file for each area of the API. A route reads a request, calls the parts above, and answers."""
