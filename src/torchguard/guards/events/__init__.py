"""What Dynamo does, told while it does it."""
