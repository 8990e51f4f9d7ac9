"""What writes files is killed between any two things that it does to them: the old ones are whole, or the new ones."""
