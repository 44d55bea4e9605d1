"""How the processes of a run start, find each other, agree and end."""
