-- Read a script's arguments by name. In Python, `arguments` in worker/queue/scripts.py writes them.

-- Return ARGV as a table of its names and values. The value of a name in `lists` is a length, and then the items.
local function read_arguments(lists)
  local arguments, at = {}, 1
  while at < #ARGV do
    local name, value = ARGV[at], ARGV[at + 1]
    at = at + 2
    if lists[name] then
      local items = {}
      for i = 1, tonumber(value) do items[i] = ARGV[at + i - 1] end
      value, at = items, at + #items
    end
    arguments[name] = value
  end
  return arguments
end
