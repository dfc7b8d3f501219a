"""The description of the HTTP surface, made from the route table and the wire types."""
