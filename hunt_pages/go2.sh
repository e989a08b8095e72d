t0=$SECONDS
cat > /tmp/vars.txt <<'X'
["q4_K", null]
["q4_K", [3, 2, 6, 4]]
["q4_K", [3, 1, 12, 4]]
["q4_K", [3, 4, 4, 4]]
["q4_K", [3, 2, 6, 6]]
["q4_K", [4, 2, 4, 4]]
["q4_K", [4, 4, 2, 4]]
["q4_K", [2, 2, 8, 4]]
["q6_K", null]
["q6_K", [3, 2, 6, 4]]
["q6_K", [3, 1, 12, 4]]
["q6_K", [3, 2, 6, 6]]
X
i=0; while read v; do i=$((i+1)); ( timeout 60 python3 hunt_pages/products.py compile "[$v]" > /tmp/pc-$i.txt 2>&1 ) & done < /tmp/vars.txt
( timeout 60 python3 hunt_pages/prof.py shapes 2 "mla 32x8192 page 64" > /tmp/w1.txt 2>&1 ) &
( timeout 60 python3 hunt_pages/prof.py shapes 2 "prefill 512 after 16384 page 16" > /tmp/w2.txt 2>&1 ) &
( timeout 60 python3 hunt_pages/prof.py shapes 2 "prefill 512 after 16384 page 128" > /tmp/w3.txt 2>&1 ) &
wait; echo "compiled $((SECONDS-t0))s"; tail -q -n 1 /tmp/pc-*.txt | cut -c1-150
timeout 45 python3 hunt_pages/products.py time "[$(paste -sd, /tmp/vars.txt)]" 2>&1 | tail -20
echo "products $((SECONDS-t0))s"
timeout 40 python3 hunt_pages/prof.py shapes 4 "decode 1x65536 page 16" "mla 32x8192 page 64" "prefill 512 after 16384 page 16" "prefill 512 after 16384 page 128" 2>&1 | tail -60
echo "shapes $((SECONDS-t0))s"
