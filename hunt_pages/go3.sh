t0=$SECONDS
V="[128,4,3,1,1] [128,4,3,1,0] [64,4,3,2,1] [128,4,1,2,1] [128,8,3,1,1] [64,2,3,2,1]"
for v in $V; do ( timeout 60 python3 hunt_pages/dec.py compile "[$v]" > /tmp/d.$v.txt 2>&1 || tail -2 /tmp/d.$v.txt ) & done; wait; echo "compiled $((SECONDS-t0))s"
timeout 60 python3 hunt_pages/dec.py time "[$(echo $V | tr ' ' ',')]" 2>&1 | tail -12
echo "$((SECONDS-t0))s"
