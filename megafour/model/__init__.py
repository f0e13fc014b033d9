"""The decoder, and the stage of it that one rank builds."""
